"""One colour for each group of memory components, the same in the terminal and on the page.

Okabe and Ito's palette, which colour-blind readers can tell apart (Okabe and Ito 2008, "Color Universal Design").
"""

COLOURS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#cc79a7",
    "weight_copies": "#9a86d6",
    "activations": "#009e73",
    "logits": "#d55e00",
    "temporaries": "#f0e442",
    "everything_else": "#44aa99",
    "overhead": "#999999",
    "python": "#999999",  # a CPU's overhead
    "kept": "#c4c4c4",
}
# Lines and points, each with a value for light and for dark paper; three to one at least against either.
LINES_LIGHT = ("#0072b2", "#c04f00", "#00795a", "#a4508b", "#5b5b5b", "#8a6d00")
LINES_DARK = ("#56b4e9", "#ff9e5e", "#33c79b", "#e39cc6", "#b5b5b5", "#e8c34a")
