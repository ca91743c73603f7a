"""Routes of engines that make vectors: embeddings, labels, scores of pairs."""
