# Mutant of proctable.hpp: a process that is stopped counts as dead, lock or no lock.
s/|| byte_is_held(seg\.fd(), index)) return false;/|| (read_stat(pid_of(ident)).state != 'T' \&\& byte_is_held(seg.fd(), index))) return false;/
s/now\.state == 'Z' ||/now.state == 'Z' || now.state == 'T' ||/
