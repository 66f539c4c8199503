"""From a problem to the text that a model is asked."""

from trustbatch.errors import did_you_mean

TEMPLATES = {
    "plain": "{problem}",
    "boxed": (
        "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    ),
}
"""by name"""


def find_template(template: str) -> str:
    """Return the text of a template, given by name or as the text itself."""
    text = TEMPLATES.get(template, template)
    if "{problem}" not in text:
        raise ValueError(
            "task.template must contain {problem}, where the problem goes, or be one of "
            f"{', '.join(TEMPLATES)}{did_you_mean(template, TEMPLATES)}."
        )
    return text
