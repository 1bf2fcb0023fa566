"""Write the JSON Schema of mmq-convert.json and mmq-verify.json.

python scripts/build_schema.py        writes mmq/report/data/report.schema.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from mmq.report.schema import ConvertReport, VerifyReport

TARGET = Path(__file__).parents[1] / "mmq" / "report" / "data" / "report.schema.json"


def schema() -> dict[str, Any]:
    """One schema for both kinds of report; `kind` tells which."""
    report = Annotated[ConvertReport | VerifyReport, Field(discriminator="kind")]
    value = TypeAdapter(report).json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mmq report",
        **value,
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
