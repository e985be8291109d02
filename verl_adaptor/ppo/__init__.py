"""PPO and its relatives: the pages (``loop``), and the pure maths beneath them (``advantage``, ``kl``, ``loss``)."""
