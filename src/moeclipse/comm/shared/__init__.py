"""Memory that ranks share: buffers, words to signal with, and the order in which others see them."""
