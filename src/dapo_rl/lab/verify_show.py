"""Prints a dry run in 80 columns or more. Prompts and responses are data: control characters are escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import duration, percent
from dapo_rl.base.quote import cut, printable, shorten
from dapo_rl.lab.verify import DryAnswer, DryRow, DryRun
from dapo_rl.lab.verify_episodes import DryMessage
from dapo_rl.lab.verify_findings import Advice, Level
from dapo_rl.outcomes import OUTCOMES

LONGEST_TEXT = 600
LONGEST_ANSWER = 80
EPISODES = 2
"""Episodes with an environment that are shown, the first ones of as many prompts."""
STATUS_STYLES = {"correct": "green", "wrong": "yellow", "unparseable": "magenta", "timeout": "red", "error": "red"}
LEVEL_STYLES: dict[Level, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


def print_dry_run(result: DryRun, console: Console | None = None) -> None:
    console = console or Console()
    write = _Writer(console)
    for number, row in enumerate(result.rows):
        _print_row(row, result.special_tokens, write, in_full=number < EPISODES)
    console.print(write.text(_summary(result), "bold"))
    if result.containment:
        console.print(write.text(result.containment))
    console.print(_findings(result.findings, write) if result.findings else Text("no findings"))


class _Writer:
    """Makes text that the console's stream can encode."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def text(self, text: str, style: str = "") -> Text:
        encoding = self.console.encoding
        safe = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        return Text(safe, style=style, overflow="fold")

    def block(self, text: str, special: Sequence[str] = ()) -> Padding:
        """An indented text in which line breaks and special tokens are visible."""
        shown = self.text(shorten(text, LONGEST_TEXT).replace("\n", "\\n\n").removesuffix("\n"))
        shown.highlight_words(["\\n"], "dim")
        shown.highlight_words([printable(token) for token in special], "cyan")
        return Padding(shown, (0, 0, 0, 2), expand=False)


def _print_row(row: DryRow, special: Sequence[str], write: _Writer, in_full: bool) -> None:
    """A prompt with its responses; `in_full` with the conversation of the first, if it is one."""
    console = write.console
    truth = "no ground truth" if row.ground_truth is None else f"ground truth {cut(row.ground_truth, LONGEST_ANSWER)}"
    head = f"row {row.row}, {row.prompt_tokens} tokens, {truth}, {OUTCOMES[row.outcome].label}"
    console.print(write.text(" ".join(head.split()), "bold"))
    console.print(write.block(row.prompt, special))
    if not any(each.messages for each in row.answers):
        console.print(Text("first response", style="dim"))
        console.print(write.block(row.answers[0].text, special))
    elif in_full:
        _print_episode(row.answers[0].messages, special, write)
    console.print(_answers(row.answers, write))
    for line in (*_parts(row.answers, write), *_logged(row.answers, write)):
        console.print(line)
    console.print()


def _print_episode(messages: Sequence[DryMessage], special: Sequence[str], write: _Writer) -> None:
    for message in messages:
        head = " ".join(f"{message.role} {message.name}".split())
        if message.turn is not None:
            head = f"turn {message.turn}, {message.tokens:,} tokens, {duration(message.seconds)}"
            head += f", reward {message.reward:.4g}" if message.reward else ""
        write.console.print(write.text(cut(head, LONGEST_ANSWER), "dim"))
        if message.text or not message.calls:
            write.console.print(write.block(message.text, special))
        for call in message.calls:
            line = write.block(f"→ {' '.join(call.split())}")
            write.console.print(line)


def _answers(answers: Sequence[DryAnswer], write: _Writer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("answer", min_width=8, max_width=30, overflow="fold")
    has_turns = any(each.messages for each in answers)
    for name in ("score", "penalty", "reward", "finish", "tokens", *(["turns"] if has_turns else [])):
        table.add_column(name, justify="left" if name == "finish" else "right", no_wrap=True)
    for each in answers:
        answer = "-" if each.answer is None else cut(" ".join(each.answer.split()), LONGEST_ANSWER)
        table.add_row(
            Text(each.status, style=STATUS_STYLES[each.status]),
            write.text(answer),
            f"{each.score:.4g}",
            f"{each.length_penalty:.4g}",
            f"{each.reward:.4g}",
            each.finish_reason,
            f"{each.tokens:,}",
            *([str(each.turns)] if has_turns else []),
        )
    return table


def _parts(answers: Sequence[DryAnswer], write: _Writer) -> Iterator[Text]:
    """A line for each of several reward functions, with its scores before the weight."""
    weights = {part.name: part.weight for each in answers for part in each.parts}
    if len(weights) == 1 and set(weights.values()) == {1.0}:
        return
    for name, weight in weights.items():
        scores = [{part.name: f"{part.score:.4g}" for part in each.parts}.get(name, "-") for each in answers]
        yield write.text(f"{name}{'' if weight == 1 else f' ×{weight:g}'}: {', '.join(scores)}")


def _logged(answers: Sequence[DryAnswer], write: _Writer) -> Iterator[Text]:
    """A line for each name that the reward functions log, with the values of the responses."""
    for name in dict.fromkeys(name for each in answers for name in each.extra):
        values = (" ".join(str(each.extra.get(name, "-")).split()) for each in answers)
        yield write.text(f"{name}: {', '.join(cut(value, LONGEST_ANSWER) for value in values)}", "dim")


def _summary(result: DryRun) -> str:
    answers = result.answers
    right = percent(sum(answer.status == "correct" for answer in answers) / len(answers))
    mean = sum(answer.reward for answer in answers) / len(answers)
    tokens = sum(answer.tokens for answer in answers)
    return (
        f"{result.model} on {result.data}, {result.prompts:,} prompt{'s' if result.prompts > 1 else ''}: "
        f"{len(answers)} response{'s' if len(answers) > 1 else ''}, {right} right, "
        f"mean reward {mean:.2f}, {tokens / len(answers):,.0f} tokens each, {duration(result.seconds)}"
    )


def _findings(findings: Sequence[Advice], write: _Writer) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for advice in findings:
        line = write.text(f"{advice.what}; {advice.remedy}")
        grid.add_row(Text(f"{advice.level}:", style=LEVEL_STYLES[advice.level]), line)
    return grid
