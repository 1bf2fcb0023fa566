"""`mmq publish`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mmq.commands.completing import complete_file, complete_folder
from mmq.commands.github_step import tell_outputs
from mmq.commands.paths import expanded
from mmq.invocation import Run, global_options

if TYPE_CHECKING:
    from mmq.publish.run import Published, PublishSettings


@click.command()
@click.argument("out", shell_complete=complete_folder)
@click.argument("repo")
@click.option("--revision", metavar="BRANCH", help="Commit there; made if absent.  [default: main]")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent; send nothing.")
@click.option(
    "--allow-unverified", is_flag=True,
    help="Publish without a passing verification of these very files; the card says so.",
)  # fmt: skip
@click.option(
    "--base-model",
    metavar="ORG/NAME",
    help="The source's repository.  [default: where it came from]",
)
@click.option("--license", "license_id", metavar="ID", help="Licence, where the card has none.")
@click.option("--license-name", metavar="NAME", help="With --license other.")
@click.option(
    "--license-link", metavar="URL|FILE", shell_complete=complete_file,
    help="With --license other.",
)  # fmt: skip
@click.option(
    "--image", "images", multiple=True, metavar="ENGINE=IMAGE:TAG[@sha256:…]",
    help="Container for vllm, vllm-rocm, sglang or tensorrt-llm; repeatable.",
)  # fmt: skip
@click.option(
    "--eval-dataset", metavar="ORG/NAME:TASK[@COMMIT]",
    help="The Hub's benchmark that level logits scored; writes .eval_results.",
)  # fmt: skip
@global_options
@click.pass_obj
def publish(
    run: Run, /, out: str, repo: str, revision: str | None, create_pr: bool, private: bool,
    dry_run: bool, allow_unverified: bool, base_model: str | None, license_id: str | None,
    license_name: str | None, license_link: str | None, images: tuple[str, ...],
    eval_dataset: str | None,
) -> int:  # fmt: skip
    """Send a verified OUT to REPO (ORG/NAME) on the Hub, with a card.

    The token is the stored one (hf auth login) or HF_TOKEN. Run the same command again after an
    interruption: what has arrived is not sent again.
    """
    from mmq.publish.eval_results import parse_dataset
    from mmq.publish.lines import published_lines
    from mmq.publish.run import PublishSettings
    from mmq.publish.run import publish as run_publish
    from mmq.publish.serve import parse_images

    given = {"license": license_id, "license_name": license_name, "license_link": license_link}
    settings = PublishSettings(
        expanded(repo), revision, create_pr, private, dry_run, allow_unverified, base_model,
        {k: v for k, v in given.items() if v}, parse_images(images),
        parse_dataset(eval_dataset) if eval_dataset else None,
    )  # fmt: skip
    done = run_publish(Path(expanded(out)), settings, run.console)
    data = _data(done, settings)
    run.console.result("\n".join(published_lines(data)), {"command": "publish", **data})
    if not dry_run:
        tell_outputs(run.console, url=data["url"], revision=data["revision"])
    return 0


def _data(done: Published, settings: PublishSettings) -> dict[str, object]:
    plan = done.plan
    batches = [*plan.batches, plan.last] if plan.last or plan.removed else [*plan.batches]
    return {
        "repo": settings.repo,
        "url": f"{done.endpoint}/{settings.repo}/tree/{done.revision.replace('/', '%2F')}",
        "revision": done.revision,
        "dry_run": settings.dry_run,
        "new_repository": not done.before.exists,
        "new_branch": done.before.exists and not done.before.has_revision,
        "private": done.private,
        "pull_request": settings.create_pr,
        "at_once": plan.at_once,
        "batches": [
            [{"name": i.name, "bytes": i.nbytes, "sha256": i.sha256} for i in batch]
            for batch in batches
        ],
        "kept": [i.name for i in plan.kept],
        "removed": list(plan.removed),
        "card_diff": done.card_diff,
    }
