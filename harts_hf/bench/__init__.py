"""How much faster an optimizer step is on trees: stock TRL, the best there is without sharing, and the tree."""
