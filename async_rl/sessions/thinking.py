"""The thinking of an answer, apart from the rest of it.

The form `<think>...</think>` is read here, also in parts of an answer; other forms are read by
vLLM's parser of reasoning of the same name in a generator, like tool calls. Pure.
"""

from async_rl.sessions.tools import TABLE

TAGS = "tags"
"""The form that is read here."""
TAG_TEXTS = _BEGIN, _END = "<think>", "</think>"
_MARKS = {form["name"]: form["mark"] for form in TABLE["thinking"]}


def thinking_form(template: str, parser: str = "") -> str:
    """Return the form of a model's thinking: TAGS, the name of a parser, or "" without thinking.

    parser: the one that the configuration names.
    """
    found = [name for name, mark in _MARKS.items() if mark in template]
    own = TAGS if _END in template else ""
    return parser or next(iter(found), own)


def is_begun(text: str) -> bool:
    """Return whether a template has begun the thinking at the end of a prompt."""
    return text.rstrip().endswith(_BEGIN)


def split(text: str, *, begun: bool) -> tuple[str, str]:
    """Return the thinking and the rest of an answer. begun: by the template."""
    written = text.lstrip()
    if not begun and not written.startswith(_BEGIN):
        # A space alone may be followed by the tag.
        return "", text if written else ""
    thinking, end, rest = written.removeprefix(_BEGIN).partition(_END)
    return thinking.strip(), rest.lstrip() if end else ""
