"""Text from outside, such as a tensor's name, made harmless in every format that reports have.

Control characters are shown as `\\x1b`, characters that turn the direction of writing as `\\u202e`;
then comes what the format itself needs:

    name                 <b>|\\n%         as stored: a newline in it
    plain                <b>|\\x0a%
    markdown             &lt;b&gt;&#124;\\\\x0a%
    xml                  &lt;b&gt;|\\x0a%
    GitHub's commands    <b>|\\x0a%25
"""

from __future__ import annotations

import re

#: C0, DEL and C1, lone surrogates, noncharacters, and the characters that reorder or hide text.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
#: An underscore inside a word is no markup.
_MARKDOWN = re.compile(r"[\\`*{}\[\]#~$]|(?<![^\W_])_|_(?![^\W_])")
#: What GitHub makes a link to an issue of: #12, GH-12.
_ISSUE = re.compile(r"#(?=\w)|\bgh-(?=\d)", re.IGNORECASE)
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", '"': "&quot;"}
#: What a Markdown code span shows as it is, in a table too.
_CODE_SAFE = re.compile(r"[\w .,:;/()+=*?!'×…–−-]+", re.ASCII)


def plain(text: object) -> str:
    """One line of text without characters that a terminal or a reader would obey."""
    return _HIDDEN.sub(_code, str(text))


def shortened(text: object, limit: int) -> str:
    """`plain`, and its middle left out beyond `limit` characters (both ends tell names apart)."""
    line = plain(text)
    if len(line) <= limit:
        return line
    head = (limit - 1) // 2
    return f"{line[:head]}…{line[len(line) - (limit - 1 - head) :]}"


def xml(text: object) -> str:
    """Text or attribute value of XML 1.0: `plain` leaves only characters that it allows."""
    line = plain(text)
    for character in '&<>"':
        line = line.replace(character, _ENTITIES[character])
    return line


def markdown(text: object) -> str:
    """Running text of GitHub's Markdown, in table cells too; no markup, link or mention in it."""
    line = _MARKDOWN.sub(r"\\\g<0>", plain(text))
    # GitHub looks for mentions and numbers of issues in the rendered text, where no escape is left
    line = _ISSUE.sub("\\g<0>\u2060", line)
    line = re.sub('[&<>|"]', lambda m: _ENTITIES[m.group()], line)
    line = line.replace("://", "&#58;//").replace("www.", "www&#46;")
    line = re.sub(r"@(?=\w)", "@\u2060", line)
    return re.sub(r"^(\s*)([-+]|\d+[.)])(?=\s)", r"\1&#8203;\2", line)


def markdown_code(text: object) -> str:
    """A name in Markdown's code style."""
    line = plain(text)
    if _CODE_SAFE.fullmatch(line) and line.strip() == line:
        return f"`{line}`"
    return f"<code>{markdown(line)}</code>" if line else ""


def workflow_data(text: object) -> str:
    """The message of a GitHub workflow command."""
    return plain(text).replace("%", "%25")


def workflow_property(text: object) -> str:
    """A property of a GitHub workflow command, such as its title."""
    return workflow_data(text).replace(":", "%3A").replace(",", "%2C")


def _code(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
