"""The class samplers, by what they look at: nothing but labels and counts (`fixed`), the weights (`conditional`), or
what was hard for a row before (`cache`). `augment_reduce.sampler` has all their names."""
