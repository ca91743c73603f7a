"""What an engine has done, as numbers."""

from jackfield.metrics.collector import EngineMetrics, MetricsCollector

__all__ = ["EngineMetrics", "MetricsCollector"]
