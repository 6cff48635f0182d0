"""What a form of the page asks, as it is typed in a terminal."""

import shlex

from foretrain.config.finetune.options import OPTION_OF, FineTune
from foretrain.config.finetune.together import idle
from foretrain.web import devices
from foretrain.web.finetune.asked import CONFIG, Asked, words_of


def command(asked: Asked, tune: FineTune) -> str:
    """The same plan in a terminal; `tune`: as it was read. Of a name that is a preset to pretrain from too, --method
    tells which is meant. What does nothing is left out: a terminal refuses it, and a form has it all the same."""
    words = ["foretrain", "plan", CONFIG if asked.config else asked.model]
    words += ["--gpu", asked.gpu] if asked.gpu != devices.HERE else []
    words += ["--used-by-others", asked.others] if asked.others.strip() else []
    if "method" not in asked.values:
        words.append(f"--method={FineTune().method}")
    nothing = idle(tune)
    values = {key: value for key, value in asked.values.items() if OPTION_OF.get(key) not in nothing}
    return shlex.join([*words, *words_of(asked.model_copy(update={"values": values}))])
