//! The Redis store on real servers.

mod contract;
mod faults;
mod replicas;
mod support;
mod survey;
mod topologies;
mod waitaof;
mod watch;
