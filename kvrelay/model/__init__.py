"""Model files: where they are, how they get here, and the text side of them (tokenizer, chat template)."""
