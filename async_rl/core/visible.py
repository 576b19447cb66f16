"""Control characters in text of a model or a data set, made visible before a terminal acts on them.

An escape sequence in a response could set the clipboard or the title of the terminal that shows it.
"""

_PICTURES = 0x2400  # Unicode has a picture for each control character: U+241B for escape
# Tables and programs need these two, and no terminal acts on them.
_KEPT = "\t\n"
_VISIBLE = {code: _PICTURES + code for code in range(32) if chr(code) not in _KEPT}
_VISIBLE |= {127: _PICTURES + 33, **dict.fromkeys(range(128, 160), 0xFFFD)}


def visible(text: str) -> str:
    """Return the text with a picture in place of each control character but tab and line feed."""
    return text.translate(_VISIBLE)
