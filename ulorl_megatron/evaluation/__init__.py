"""How right a policy is: every N steps of training (periodic), and by itself (`ulorl eval`)."""
