"""What an export needs beside the model's files: a model card made from the run, and the upload to the Hub."""
