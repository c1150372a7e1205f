"""The Okabe–Ito palette, which colour-blind readers can tell apart."""

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#999999", "#222222"
BROWN = "#7A4F2B"
"""Beyond the palette."""
