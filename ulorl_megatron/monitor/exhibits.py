"""What of a step is shown besides numbers."""

from dataclasses import dataclass
from typing import Dict, List


@dataclass(frozen=True)
class Exhibits:
    """Of the samples completed in a step.

    lengths: response tokens of each. ages: weight versions ago -> how many of their tokens were made then. texts: a few
    of them, in Markdown.
    """

    lengths: List[int]
    ages: Dict[int, int]
    texts: List[str]


def sample_text(*, prompt: str, response: str, answer: str, reward: float, verdict: str, versions: int) -> str:
    """One sample for people. verdict: by whom the reward was given, or why not."""
    return (
        f"**reward {reward:g}** ({verdict}), reference answer `{answer}`, made by {versions} weight versions\n\n"
        f"{_block(prompt)}\n\n{_block(response)}"
    )


def _block(text: str) -> str:
    """As it is, whatever it holds: indented lines are code to Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
