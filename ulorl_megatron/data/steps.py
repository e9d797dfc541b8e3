"""The steps a pipeline may have, by name."""

from typing import Dict, Type

from ulorl_megatron.data.difficulty import Difficulty
from ulorl_megatron.data.duplicates import ExactDuplicates, NearDuplicates, Overlap
from ulorl_megatron.data.prompt import Instruction, PromptLength
from ulorl_megatron.data.question_form import QuestionForm, SubQuestions
from ulorl_megatron.data.reference import AnswerForm, ShortAnswer
from ulorl_megatron.data.step import Step
from ulorl_megatron.data.suspicious import Suspicious

STEPS: Dict[str, Type[Step]] = {
    "short_answer": ShortAnswer,
    "answer_form": AnswerForm,
    "sub_questions": SubQuestions,
    "question_form": QuestionForm,
    "exact_duplicates": ExactDuplicates,
    "near_duplicates": NearDuplicates,
    "overlap": Overlap,
    "instruction": Instruction,
    "prompt_length": PromptLength,
    "suspicious": Suspicious,
    "difficulty": Difficulty,
}
