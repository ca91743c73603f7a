"""Running the server: who may call it, limits, logs, metrics, traces, starting and stopping."""
