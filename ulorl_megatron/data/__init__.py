"""Problems to solve: reading them, and the order in which they are issued."""

from ulorl_megatron.data.prompts import Prompt, PromptSet, encode_prompt

__all__ = ["Prompt", "PromptSet", "encode_prompt"]
