"""What `plan` and `advise` ask and print; and here the options that they share with `mfu` and `report`."""

from foretrain.cli.command import option

gpu = option(
    "--gpu CARD",
    "The card, such as 'RTX 4070'; 3060,4070 compares cards. cpu means this machine.",
    default="auto",
    group="card",
)
gpus = option(
    "--gpus CARDS",
    "Cards that train one model together, such as '2 x RTX 4090'. Or '2 nodes x 8 x A100'; a count alone is of each "
    "card of --gpu.",
    default="",
    group="card",
)
link = option(
    "--link NAME",
    "With --gpus: what connects the cards of a machine, such as pcie4x8 or nvlink. Default: what such cards usually "
    "have.",
    default="",
)
network = option(
    "--network NAME",
    "With --gpus: what connects the machines, such as 10GbE, ib-400 or '8 x ib-200'. Default: what such machines "
    "usually have.",
    default="",
)
others = option(
    "--used-by-others SIZE",
    "Memory used by other programs on the card, such as 2GB. On this machine's card foretrain measures it.",
    name="others",
    default="",
    group="card",
)
price = option(
    "--price PRICE",
    "Rent per hour of the card or machine, such as 0.35/h. Or '$0.35/h'; for several cards also "
    "'4090=0.35,A100=1.2'; with --gpus of each card. A rented card costs its rent and no electricity.",
    group="card",
)
