"""How samples get into batches: one file per loader, chosen by conf/loader/."""
