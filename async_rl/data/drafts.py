"""From a row of a data file to a prompt: its id, its chat, its tests, its tokens.

Invariants
- A prompt's token ids encode its text, chat template and generation prompt included; none is
  longer than data.max_prompt_tokens.
- No row vanishes: each becomes a prompt or is rejected, with its origin and the reason.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from async_rl.config.run import RunConfig
from async_rl.core.assert_tests import names_asked, require_importable
from async_rl.core.errors import DataError, PromptTooLong, at
from async_rl.core.frozen import frozen
from async_rl.core.types import AnswerTest, CodeProblem, Prompt
from async_rl.data.files import Placed, Row, read_rows
from async_rl.data.problems import TABLE, layout_of, read_problem, unfolded

# In our own files, AReaL (query_id), MBPP and HumanEval (task_id), APPS and LiveCodeBench.
_ID_COLUMNS = ("prompt_id", "id", "query_id", "task_id", "problem_id", "question_id")
MAX_ID_LENGTH = 256
"""Characters. Ids are stored with every group and shown in tables, so a longer one is a bad row."""


class _Message(msgspec.Struct, frozen=True):
    """One message of a chat; its other fields are left out."""

    role: str
    content: str


_Chat = Annotated[list[_Message], Meta(min_length=1)]


@frozen
class Draft:
    """A prompt before tokenization."""

    origin: str
    prompt_id: str
    text: str
    data_source: str
    problem: CodeProblem


Outcome = tuple[int, Prompt | DataError]
"""A row's number of tokens before truncation (0 without a draft), and its prompt or why it has
none.
"""


class Drafter:
    """Makes the prompts of these files. The tokenizer renders chats and counts tokens."""

    def __init__(self, files: Sequence[str], config: RunConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._names = _names(files)
        self._origins: dict[str, str] = {}
        file = config.data.metadata_file
        rows = () if file is None else read_rows(file)
        # Further columns by id. No row of a data file finds a row without an id.
        self._metadata = {self._id(row): row for _, row in rows}

    def draft(self, file: str, number: int, placed: Placed) -> Draft | DataError:
        """The draft of a row, the number-th of its file, or why it becomes no prompt."""
        origin, row = placed
        if isinstance(row, DataError):
            return row
        try:
            with at(origin):
                draft = self._draft(origin, f"{self._names[file]}/", number, row)
                first = self._origins.setdefault(draft.prompt_id, origin)
                # The ledger identifies prompts by id: two with the same one would share a history.
                if first == origin:
                    return draft
                raise DataError(
                    f"id {draft.prompt_id} is also the id of {first}; give each row its own id"
                )
        except DataError as error:
            return error

    def encode(self, drafts: Sequence[Draft]) -> Iterator[Outcome]:
        """(number of tokens before truncation, prompt) of each draft, tokenized together."""
        # A chat template writes the special tokens itself.
        rows = self._tokenizer(
            [draft.text for draft in drafts],
            add_special_tokens=not self._tokenizer.chat_template,
            # Only the ids are used, and the mask of a long prompt is as large as its ids.
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        data = self._config.data
        # The number before truncation: it distinguishes a cut prompt from one that fits exactly.
        for draft, ids in zip(drafts, rows, strict=True):
            kept = fitted(ids, data.max_prompt_tokens, data.truncation)
            if kept is None:
                reason = (
                    f"{draft.origin}: {len(ids)} tokens are over"
                    f" data.max_prompt_tokens={data.max_prompt_tokens}; raise it, or set"
                    " data.truncation=drop"
                )
                yield len(ids), PromptTooLong(reason)
                continue
            if data.fills_prompts:
                kept = filled(kept, data.max_prompt_tokens)
            # A prompt that was cut must be shown as the model reads it.
            is_changed = len(kept) != len(ids)
            prompt = Prompt(
                prompt_id=draft.prompt_id,
                text=self._tokenizer.decode(kept) if is_changed else draft.text,
                token_ids=np.array(kept, dtype=np.int32),
                data_source=draft.data_source,
                problem=draft.problem,
            )
            yield len(ids), prompt

    def render(self, messages: list[dict[str, str]], *, is_chat: bool = False) -> str:
        """The text to be continued: chat template and generation prompt, or the plain text and
        a newline without a template.
        """
        if self._tokenizer.chat_template:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        if is_chat:
            raise DataError(
                "the prompt is a chat and the tokenizer has no chat template; use a chat"
                " model, or plain strings as prompts"
            )
        return messages[0]["content"] + "\n"

    def _id(self, row: Row) -> str | None:
        id_key = self._config.data.id_key
        for column in _ID_COLUMNS if id_key is None else (id_key,):
            if row.get(column) is not None:
                return str(row[column])
        return None

    def _draft(self, origin: str, prefix: str, number: int, row: Row) -> Draft:
        data = self._config.data
        name = self._id(row)
        if name is None and data.id_key is not None:
            raise DataError(
                f"no column {data.id_key!r}, only {sorted(row)}; set data.id_key to the"
                " column with the id"
            )
        if name is not None and len(name) > MAX_ID_LENGTH:
            raise DataError(
                f"the id {name[:40]!r}... has {len(name)} characters, over"
                f" {MAX_ID_LENGTH}; shorten it, or set data.id_key to another column"
            )
        if data.metadata_file is not None:
            if name is None or name not in self._metadata:
                raise DataError(
                    f"data.metadata_file={data.metadata_file} has no row with the id {name!r}; add"
                    " it"
                )
            # A column of the row wins over one of the metadata: the row is the more specific
            # source.
            row = self._metadata[name] | row
        prompt_key = data.prompt_key
        problem, shown = read_hidden(row, self._config)
        require_importable(problem, self._config.sandbox.packages)
        row = _with_prompt(unfolded(row), prompt_key)
        layout = layout_of(row)
        # Our own rows say themselves what the prompt shows.
        is_own = layout is None or layout.form == "own"
        messages = _messages(row, prompt_key, shown, () if is_own else names_asked(problem))
        source = row.get("data_source")
        # Rewards can be set per data_source, so every prompt needs one.
        if not isinstance(source, str):
            first = next(iter(problem.tests), None)
            source = first.rule if isinstance(first, AnswerTest) else "code"
        return Draft(
            origin=origin,
            prompt_id=prefix + (str(number) if name is None else name),
            text=self.render(messages, is_chat=isinstance(row[prompt_key], list)),
            data_source=source,
            problem=problem,
        )


def _names(files: Sequence[str]) -> dict[str, str]:
    """The prefix of the ids of each file's rows: its name, with the name of its folder if two files
    have the same name.
    """
    stems = Counter(PurePosixPath(file).stem for file in files)
    names = {}
    for file in files:
        path = PurePosixPath(file)
        # Two files named train.jsonl in different folders would otherwise produce equal ids.
        is_unique = stems[path.stem] == 1
        names[file] = path.stem if is_unique else f"{path.parent.name}/{path.stem}"
    return names


def read_hidden(row: Row, config: RunConfig) -> tuple[CodeProblem, tuple[str, ...]]:
    """As `read_problem`, with the row itself if a reward function scores it or a function or agent
    leads the rollouts. Such a row needs no tests unless one of its functions needs them.
    """
    reward = config.reward
    if not reward.functions and config.rollout.fn is None:
        return read_problem(row)
    problem = CodeProblem(tests=[])
    shown: tuple[str, ...] = ()
    # An agent may return the reward, so a row without any tests is right.
    is_scored_by_agent = config.agent.is_used and layout_of(unfolded(row)) is None
    if reward.needs_tests(str(row.get("data_source"))) and not is_scored_by_agent:
        problem, shown = read_problem(row)
    # Parquet has dates and decimals, which JSON lacks: a function receives them as text.
    text = msgspec.json.encode(row, enc_hook=str).decode()
    return msgspec.structs.replace(problem, row=text), shown


def _with_prompt(row: Row, prompt_key: str) -> Row:
    """The unfolded row with its prompt as column `prompt`, if another column has it.

    A column that the configuration names is never replaced by another one.
    """
    if prompt_key != "prompt":
        return row
    layout = layout_of(row)
    columns = layout.prompt if layout is not None else []
    if not columns and row.get(prompt_key) is None:
        columns = [column for column in TABLE.prompts if row.get(column) is not None][:1]
    texts = [row[column] for column in columns if row.get(column)]
    # A single column may be a chat.
    prompt = texts[0] if len(texts) == 1 else "\n\n".join(map(str, texts))
    return row | {prompt_key: prompt} if texts else row


def _messages(
    row: Row, prompt_key: str, shown: Sequence[str], names: Iterable[str]
) -> list[dict[str, str]]:
    """The chat of a row; a plain string is one user message. To the last message are added assert
    statements that the prompt must show, the code that a program starts from, and those of the
    names that the tests ask for that no message has.
    """
    prompt = row.get(prompt_key)
    if prompt is None:
        raise DataError(
            f"column {prompt_key!r} has no prompt, the columns are {sorted(row)}; set"
            " data.prompt_key to the column with the prompt, or data.bad_rows=drop"
        )
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        messages: list[dict[str, str]] = msgspec.to_builtins(msgspec.convert(chat, _Chat))
    except msgspec.ValidationError as error:
        raise DataError(
            f"column {prompt_key!r} must be a string or a list of {{role, content}}, this"
            f" is {str(prompt)[:80]!r}"
        ) from error
    if shown:
        messages[-1]["content"] += "\nYour code should pass these tests:\n" + "\n".join(shown)
    starter = row.get("starter_code")
    if isinstance(starter, str) and starter.strip() not in messages[-1]["content"]:
        messages[-1]["content"] += f"\nStart from this code:\n{starter}"
    text = " ".join(message["content"] for message in messages)
    if missing := ", ".join(sorted(name for name in names if name not in text)):
        messages[-1]["content"] += f"\nYour code should define: {missing}"
    return messages


def fitted(
    ids: Sequence[int], limit: int, mode: Literal["error", "drop", "left", "right", "middle"]
) -> list[int] | None:
    """At most `limit` of the ids: the last ones ("left" is cut off), the first ones, or some of
    both; None where none may be cut.

    ids: int [L] -> int [min(L, limit)].  With an odd limit "middle" keeps one more at the end,
    where the question and the generation prompt are.
    """
    if len(ids) <= limit:
        return list(ids)
    num_first = {"left": 0, "right": limit, "middle": limit // 2}.get(mode)
    if num_first is None:
        return None
    return [*ids[:num_first], *ids[len(ids) - (limit - num_first) :]]


def filled(ids: Sequence[int], length: int) -> list[int]:
    """The ids repeated to exactly `length`, ending as they end. ids: int [L], 1 <= L <= length ->
    int [length].
    """
    repeated = list(ids) * -(-length // len(ids))
    return repeated[len(repeated) - length :]
