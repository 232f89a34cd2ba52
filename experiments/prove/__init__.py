"""The proof by measurement: one calibration, then plans executed that were not calibrated on, each predicted beforehand."""
