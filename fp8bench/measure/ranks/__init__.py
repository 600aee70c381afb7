"""Several ranks as one worker: started by a launcher, asked together, their answers made one."""
