"""The languages of programs, with the names that others use for them, and how printed text is
compared: the rules, and a checker in their place. Pure.
"""

from typing import Annotated, Final, Literal, get_args

from msgspec import Meta

from async_rl.core.frozen import Value

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


class OutputRules(Value):
    """The rules of a problem for comparing printed text.

    layout: lines = the same tokens on each line, tokens = the same tokens in any layout, exact =
    the same characters. A number may differ by a tolerance, relative to the expected number or
    absolute; with 0 and 0 numbers are equal exactly.
    """

    layout: Literal["lines", "tokens", "exact"] = "lines"
    ignores_case: bool = False
    relative_tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.0
    absolute_tolerance: Annotated[float, Meta(ge=0)] = 0.0


class Checker(Value):
    """A program that decides about printed text, where several outputs are right. It is trusted
    as tests are, and runs in the jail (sandbox/programs.py has the forms). interacts: it runs next
    to the program, reads what the program prints, and prints what the program reads.
    """

    code: str
    form: Literal["kattis", "testlib", "printed"]
    language: Language = PYTHON
    interacts: bool = False

    def __post_init__(self) -> None:
        if self.form == "printed" and (self.interacts or self.language != PYTHON):
            raise ValueError("a checker that interacts, or is not in Python, has another form")
