"""The pipeline of decisions, from configuration and facts to a resolution."""
