"""How large a study is: a tiny model on a CPU, a small one on a GPU, or the paper's."""
