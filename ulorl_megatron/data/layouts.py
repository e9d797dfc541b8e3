"""The layouts that problems come in, and what a row of each becomes: {"prompt", "answer", "solution"?, "origin"}.

A layout takes a row and returns the new one without origin, or Dropped. It raises KeyError, TypeError or ValueError
where the row is not of that layout. Keys are those of the data sets' Hugging Face repositories.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, Tuple, Union

from ulorl_megatron.data.files import Row, read_rows, row_files
from ulorl_megatron.errors import UserError
from ulorl_megatron.verifier.answer import extract_answer


@dataclass(frozen=True)
class Dropped:
    """Why a row is left out. reason: the kind, by which the report counts. detail: what is particular to the row."""

    reason: str
    detail: str = ""


Outcome = Union[Row, Dropped]

# What DAPO-Math-17k puts around each problem.
_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
_GSM8K_NOTE = re.compile(r"<<[^<>]*>>")  # the calculator's notes: 48/2 = <<48/2=24>>24
_INTEGER = re.compile(r"0*(\d+)")


def _rows(row: Row) -> Outcome:
    """Our own: prompt (a string or messages) and answer; further keys stay."""
    prompt = row["prompt"]
    if isinstance(prompt, list):
        texts = [(message["role"], message["content"]) for message in prompt]
        if not all(isinstance(text, str) for pair in texts for text in pair) or "user" not in dict(texts):
            raise ValueError("'prompt' has a message that is no text, or none of the user")
    return row | {"answer": _text(row["answer"])}


def _dapo(row: Row) -> Outcome:
    """BytedTsinghua-SIA/DAPO-Math-17k. Its file holds every problem a hundred times; see exact_duplicates."""
    (message,) = row["prompt"]
    prompt = message["content"].removeprefix(_DAPO_HEAD).removesuffix(_DAPO_TAIL)
    return {"prompt": prompt, "answer": _text(row["reward_model"]["ground_truth"])}


def _deepscaler(row: Row) -> Outcome:
    """agentica-org/DeepScaleR-Preview-Dataset."""
    return _solved(row["problem"], _text(row["answer"]), row["solution"])


def _aime(row: Row) -> Outcome:
    """HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024, math-ai/aime24 and aime25, opencompass/AIME2025.

    Their keys differ. Answers are whole numbers, written with leading zeros by some.
    """
    keys = {key.lower(): value for key, value in row.items()}
    prompt = keys["problem"] if "problem" in keys else keys["question"]
    solution = keys.get("solution") or ""
    answer = _text(keys["answer"]) if "answer" in keys else _boxed(solution)
    number = _INTEGER.fullmatch(answer.strip("$ ").removesuffix("^\\circ").removesuffix("°"))
    if number is None:
        return Dropped("no whole number as the answer", f"{answer!r}")
    return _solved(prompt, number[1], solution)


def _beyond_aime(row: Row) -> Outcome:
    """ByteDance-Seed/BeyondAIME."""
    return {"prompt": row["problem"], "answer": _text(row["answer"])}


def _math(row: Row) -> Outcome:
    """hendrycks/competition_math and its copies, with the answer boxed in the solution; MATH-500 has it apart too."""
    solution = row["solution"]
    answer = _text(row["answer"]) if "answer" in row else _boxed(solution or "")
    if not answer:
        return Dropped("no boxed answer in the worked solution")
    return _solved(row["problem"], answer, solution)


def _gsm8k(row: Row) -> Outcome:
    """openai/gsm8k: worked answers that end in "#### 1,234"."""
    worked, mark, answer = row["answer"].rpartition("####")
    if not mark or not answer.strip():
        return Dropped("no answer after ####")
    return _solved(row["question"], answer.strip().replace(",", ""), _GSM8K_NOTE.sub("", worked).strip())


LAYOUTS: Dict[str, Callable[[Row], Outcome]] = {
    "rows": _rows,
    "dapo": _dapo,
    "deepscaler": _deepscaler,
    "aime": _aime,
    "beyond_aime": _beyond_aime,
    "math": _math,
    "gsm8k": _gsm8k,
}


def read_layout(path: Path, layout: str) -> Iterator[Tuple[Row, Outcome]]:
    """(row as it came, what it became) of the file or folder `path`.

    Raises UserError naming file and line for a row of another layout.
    """
    for file in row_files(path):
        for number, row in read_rows(file):
            place = f"{file}:{number}"
            if not isinstance(row, dict):
                raise UserError(f"{place}: a {type(row).__name__}, where an object is needed")
            try:
                outcome = _sound(LAYOUTS[layout](row))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"{place}: not a row of layout {layout} ({error!r}); it has the keys {', '.join(map(repr, row))}. "
                    f"Layouts: {', '.join(LAYOUTS)}"
                ) from error
            yield row, outcome if isinstance(outcome, Dropped) else {"origin": place} | outcome


def _sound(outcome: Outcome) -> Outcome:
    """Dropped where question or answer are missing in this one row."""
    if isinstance(outcome, Dropped):
        return outcome
    prompt, answer = outcome["prompt"], outcome["answer"]
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        return Dropped("no question")
    if not isinstance(prompt, (str, list)):
        raise TypeError(f"the question is a {type(prompt).__name__}")
    return outcome if answer.strip() else Dropped("no answer")


def _boxed(solution: str) -> str:
    return (extract_answer(solution) or "") if "\\boxed" in solution else ""


def _solved(prompt: str, answer: str, solution: str) -> Row:
    row = {"prompt": prompt, "answer": answer}
    return row | {"solution": solution} if solution and solution.strip() else row


def _text(answer: Union[str, int, float, None]) -> str:
    if answer is None:
        return ""
    if isinstance(answer, (bool, list, dict)):
        raise TypeError(f"the answer is a {type(answer).__name__}")
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)
