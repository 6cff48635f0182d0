"""A trained model in the files that other programs read: one form a file. `forms.py` lists them."""
