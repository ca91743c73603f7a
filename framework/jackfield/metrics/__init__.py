"""What an engine has done, as numbers."""

from jackfield.metrics.collector import EngineMetrics, MetricsCollector
from jackfield.metrics.histogram import Histogram, HistogramData

__all__ = ["EngineMetrics", "Histogram", "HistogramData", "MetricsCollector"]
