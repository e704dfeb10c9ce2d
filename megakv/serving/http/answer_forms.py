"""How families of models write reasoning and calls of tools, known by their chat templates, as answer templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import get_response_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Template: TypeAlias = dict[str, Any]
THOUGHTS = {"open": "<think>", "close": "</think>", "content": "text"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""A call whose name is in its mark."""
EACH = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
"""A call of a list, that has both."""
WHOLE = {"type": "function", "function": "{content}"}
"""A call that is an object of both."""


def _form(anchor: str | list[str], calls: Template, end: str, thoughts: Template = THOUGHTS) -> Template:
    """A template; `end` is a pattern of what ends content."""
    content = {"close_pattern": end, "content": "text"}
    fields = {"reasoning_content": thoughts, "tool_calls": {"repeats": True, **calls}, "content": content}
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


CHAT_ML_END = r"\s*(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>)"
OBJECT_CALLS = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "transform": WHOLE}
HERMES = _form("<|im_start|>assistant\n", OBJECT_CALLS, CHAT_ML_END)
"""Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3."""
QWEN_CODER = _form(
    "<|im_start|>assistant\n",
    {
        "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
        "close": "</function>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": NAMED,
    },
    rf"{CHAT_ML_END}|\s*</tool_call>",
)
"""Qwen 3 Coder, and what has learned from it; its calls may come without the outer mark."""
LLAMA_3 = _form(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    {
        # It is a call where the answer begins with one.
        "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*\"(?:type\"\s*:\s*\"function\"\s*,\s*\")?name\"\s*:)",
        "close_pattern": r"\s*(?:<\|eot_id\|>|<\|eom_id\|>)",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
    },
    r"\s*(?:<\|eot_id\|>|<\|eom_id\|>|<\|end_of_text\|>)",
)
"""Llama 3.1 to 3.3."""
MISTRAL_THOUGHTS = {"open": "[THINK]", "close": "[/THINK]", "content": "text"}
MISTRAL_ANCHORS = ["[/INST]", "[/TOOL_RESULTS]"]
MISTRAL = _form(
    MISTRAL_ANCHORS,
    {
        "open_pattern": r"\s*\[TOOL_CALLS\]\s*",
        "close": "</s>",
        "content": "json",
        "transform": EACH,
        "transform_each": True,
    },
    r"\s*</s>",
    MISTRAL_THOUGHTS,
)
"""Mistral 7B of version 0.3, Nemo, Small up to 3.1: all calls as one list."""
MISTRAL_NAMED = _form(
    MISTRAL_ANCHORS,
    {
        "open_pattern": r"\s*\[TOOL_CALLS\](?P<name>[^\[\{\s]+)(?:\[CALL_ID\][^\[\{\s]*)?\[ARGS\]",
        "close_pattern": r"\s*(?:(?=\[TOOL_CALLS\])|</s>)",
        "content": "json",
        "transform": NAMED,
    },
    r"\s*</s>",
    MISTRAL_THOUGHTS,
)
"""Mistral Small 3.2, Devstral, Magistral: a mark and a name before each."""
DEEPSEEK = _form(
    ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"],
    {
        "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
        r"(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\s|(?!function<)(?P<name>[^\n<]+)<｜tool▁sep｜>)",
        "close_pattern": r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
        "content": "json",
        "transform": NAMED,
    },
    r"\s*(?:<｜end▁of▁sentence｜>|<｜tool▁calls▁end｜>)",
)
"""DeepSeek V3 and R1, those distilled from it, and V3.1, which leaves out two marks."""
GLM = _form(
    "<|assistant|>",
    {
        "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\n<]+?)\s*(?=<arg_key>|</tool_call>)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": NAMED,
    },
    r"\s*(?:<\|user\|>|<\|observation\|>|<\|endoftext\|>)",
)
"""GLM 4.5 to 4.7."""
PHI_MINI = _form(
    "<|assistant|>",
    {
        "open_pattern": r"\s*(?:<\|tool_call\|>|functools(?=\[))\s*",
        "close_pattern": r"\s*(?:<\|/tool_call\|>|<\|end\|>)",
        "content": "json",
        "transform": EACH,
        "transform_each": True,
    },
    r"\s*(?:<\|end\|>|<\|endoftext\|>)",
)
"""Phi 4 mini."""
PHI = _form("<|im_start|>assistant<|im_sep|>", OBJECT_CALLS, CHAT_ML_END)
"""Phi 4, whose reasoning has marks."""
HARMONY = _form(
    "<|start|>assistant",
    {
        "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\."
        r"(?P<name>[\w.-]+)\s*(?:<\|channel\|>(?:commentary|analysis))?\s*(?:(?:<\|constrain\|>)?json)?\s*<\|message\|>",
        "close_pattern": r"<\|call\|>|<\|end\|>",
        "content": "json",
        "transform": NAMED,
    },
    r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>"
    r"|<\|end\|>|<\|return\|>",
    {
        "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
        "close": "<|end|>",
        "content": "text",
    },
)
"""GPT-OSS: each channel has a mark."""
GRANITE_END = r"\s*(?:<\|end_of_text\|>|</?response>)\s*"
GRANITE_ANCHOR = "<|start_of_role|>assistant<|end_of_role|>"
GRANITE_3 = _form(
    GRANITE_ANCHOR,
    {
        "open_pattern": r"\s*<\|?tool_call\|?>\s*",
        "close": "<|end_of_text|>",
        "content": "json",
        "transform": EACH,
        "transform_each": True,
    },
    GRANITE_END,
)
"""Granite 3: all calls as one list."""
GRANITE_4 = _form(GRANITE_ANCHOR, OBJECT_CALLS, GRANITE_END)
"""Granite 4: as Hermes."""

FORMS: tuple[tuple[tuple[str, ...], Template], ...] = (
    (("<|start_of_role|>", "<|tool_call|>"), GRANITE_3),
    (("<|start_of_role|>", "<tool_call>"), GRANITE_4),
    (("<|im_start|>", "<function=", "<parameter="), QWEN_CODER),
    (("<|im_start|>", "<|im_sep|>"), PHI),
    (("<|im_start|>", "<tool_call>"), HERMES),
    (("<|start_header_id|>", '"parameters": '), LLAMA_3),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<｜Assistant｜>",), DEEPSEEK),
    (("<|assistant|>", "<arg_key>"), GLM),
    (("<|assistant|>", "<|tool|>"), PHI_MINI),
    (("<|start|>", "<|channel|>"), HARMONY),
)
"""What a chat template has in it, all of it, for each; the first one counts."""


def answer_template(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Any:
    """A model's answer template: its own, that of a family, or what transformers knows by its type; None else.

    A family's goes by what the chat template writes, so that models that others were trained further from have theirs.
    """
    own = getattr(tokenizer, "response_template", None)
    return own or known_form(tokenizer.chat_template) or get_response_template(tokenizer, model)


def known_form(chat_template: Any) -> Template | None:
    """Template for answers to a chat template, or to several by name."""
    texts = chat_template.values() if isinstance(chat_template, dict) else [chat_template or ""]
    text = "\n".join(texts)
    return next((form for marks, form in FORMS if all(mark in text for mark in marks)), None)
