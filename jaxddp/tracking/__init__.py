"""Run folder, console log, metrics files, TensorBoard and plots, without a framework."""
