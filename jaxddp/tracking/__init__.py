"""Run folder, console log, metrics files, TensorBoard and plots. Framework-free."""
