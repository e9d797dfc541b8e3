"""Tasks side by side, of which one may fail."""

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """asyncio.TaskGroup that raises the first error as itself: the other tasks are cancelled, nothing is wrapped."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as errors:
        raise _first(errors) from errors


def _first(errors: ExceptionGroup) -> Exception:
    """The error that ended a task group, nested groups opened."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
