"""Several ranks as one worker: started by torch's launcher, asked together, their answers made one."""
