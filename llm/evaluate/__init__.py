"""What a trained run can do: loss by set, length and position, recall, decoding (``python -m llm.evaluate``)."""
