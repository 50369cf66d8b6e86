"""One vocabulary of collectives: what each does, costs, is for, and which operations of different ranks belong together."""
