"""The programming languages that a program may be written in, and the names that others use for
them. Pure.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Language = Literal["python", "cpp", "c", "java", "javascript", "rust", "go", "shell"]
PYTHON: Final = "python"
LANGUAGES: tuple[Language, ...] = get_args(Language)

# Words after a fence, and the names of data sets, SandboxFusion and AReaL, in lower case.
_OTHER_NAMES: dict[Language, tuple[str, ...]] = {
    "python": ("python3", "py"),
    "cpp": ("c++", "cxx", "cc", "cplusplus", "g++", "cpp17", "cpp20"),
    "c": (),
    "java": (),
    "javascript": ("js", "node", "nodejs"),
    "rust": ("rs",),
    "go": ("golang",),
    "shell": ("bash", "sh"),
}
_BY_NAME = {
    name: language for language, others in _OTHER_NAMES.items() for name in (language, *others)
}


def language_of(name: str) -> Language | None:
    """The language with this name in any case; None if there is none."""
    return _BY_NAME.get(name.strip().lower())


def names_of(language: Language) -> frozenset[str]:
    """Every name of the language, in lower case."""
    return frozenset((language, *_OTHER_NAMES[language]))
