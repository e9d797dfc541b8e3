"""The report of a cleaning, as Markdown: what each step took away, why, and examples."""

from typing import Any, Dict, List

from ulorl_megatron.data.step import text_of

_SHOWN = 240  # characters of a text


def report(title: str, records: List[Dict[str, Any]]) -> str:
    """records: those of clean.Record, as dictionaries."""
    lines = [f"# {title}", "", "| step | rows in | rows out | changed | dropped |", "|---|---:|---:|---:|---:|"]
    for record in records:
        lost = record["read"] - record["kept"]
        lines.append(f"| {record['name']} | {record['read']} | {record['kept']} | {record['changed']} | {lost} |")
    for record in records:
        if not record["examples"]:
            continue
        settings = ", ".join(f"{key}: {value}" for key, value in record["settings"].items() if record["name"] != "read")
        lines += ["", f"## {record['name']}", *([settings] if settings else [])]
        for kind, count in [("changed", record["changed"]), *record["dropped"].items()]:
            if kind not in record["examples"]:
                continue
            lines += ["", f"### {kind if kind == 'changed' else f'dropped: {kind}'} ({count})", ""]
            for example in record["examples"][kind]:
                lines += _example(example)
    return "\n".join(lines) + "\n"


def _example(example: Dict[str, Any]) -> List[str]:
    row = example["row"]
    shown = [f"- {row.get('origin', '')} {_short(_said(row))} **{_short(str(row.get('answer', '')))}**"]
    if "became" in example:
        new = example["became"]
        solved = new.get("solved", "")
        shown.append(f"  - became {_short(_said(new))} **{_short(str(new['answer']))}** {solved}".rstrip())
    elif example["detail"]:
        shown.append(f"  - {_short(example['detail'])}")
    return shown


def _said(row: Dict[str, Any]) -> str:
    """The question of a row, be it of our form or still of its own."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt):
        return text_of(row)
    return str(next((row[key] for key in ("problem", "Problem", "question", "Question") if key in row), ""))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
