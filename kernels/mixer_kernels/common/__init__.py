"""What several operators share: argument checks, the layout of chunks, products under decay."""
