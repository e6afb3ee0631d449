"""The machine and the process: errors, files, devices, versions, progress, and the processes of a job."""
