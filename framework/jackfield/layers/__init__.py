"""Building blocks of models. A model file sees them through :class:`jackfield.interfaces.BuildContext`."""
