"""What is measured of a step: times, traces, memory."""
