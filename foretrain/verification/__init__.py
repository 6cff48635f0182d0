"""`foretrain verify`: short runs on this machine's card, each predicted and then measured in a process of its own."""
