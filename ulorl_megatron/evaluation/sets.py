"""The data sets of an evaluation."""

from pathlib import Path
from typing import Dict, List

from transformers import PreTrainedTokenizerBase

from ulorl_megatron.attempts import Problem
from ulorl_megatron.config.schema import Config
from ulorl_megatron.config.sets import evaluation_sets
from ulorl_megatron.data import PromptSet
from ulorl_megatron.errors import UserError


def read_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> Dict[str, List[Problem]]:
    """name -> problems, the first evaluation.max_prompts of each (0: all). Raises UserError naming file and line."""
    sets = {}
    for name, file in evaluation_sets(config.data).items():
        prompts = PromptSet(file, tokenizer, config.data.max_prompt_length, config.run.seed)
        chosen = prompts.first(config.evaluation.max_prompts or len(prompts))
        sets[name] = [Problem(prompt.tokens, prompt.answer) for prompt in chosen]
        keys = [problem.key for problem in sets[name]]
        if len(set(keys)) < len(keys):
            twice = next(i for i, key in enumerate(keys) if key in keys[:i])
            raise UserError(f"{Path(file)}: problem {twice + 1} is there twice; take one out (ulorl data clean does)")
    return sets
