"""The look at the whole job before it runs: prefix tree, output lengths, order, plan."""
