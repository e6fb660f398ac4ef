//go:build unix

package oncegate

import (
	"context"
	"net"
	"os"
	"syscall"
	"testing"
)

// Clients that hold all file descriptors of the process do not switch the protection off.
func TestAProcessWithoutFileDescriptorsIsNoOutage(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(closed.Addr().String())
	closed.Close()
	dial := func(host string) error {
		_, err := net.Dial("tcp", net.JoinHostPort(host, port))
		return unsentError("claim", err)
	}
	if err := dial("127.0.0.1"); !isOutOfReach(err) {
		t.Fatal("a refused connection is an outage:", err)
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 256
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
	for {
		file, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		defer file.Close()
	}
	for _, err := range []error{dial("127.0.0.1"), dial("localhost"), statementError(context.Background(), "claim", context.DeadlineExceeded)} {
		if isOutOfReach(err) {
			t.Error(err)
		}
	}
}
