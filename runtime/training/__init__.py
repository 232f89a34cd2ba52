"""Training: what people expect around a step: config, schedule, callbacks, run folder, resume."""
