// Go's net/http: reports each request as an application sees it. `main FOLDER PORT …`
package main

import (
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
)

// Return the first value of a header as hexadecimal digits, or nil if the header is absent.
func value(header http.Header, name string) *string {
	if header.Values(name) == nil {
		return nil
	}
	text := hex.EncodeToString([]byte(header.Get(name)))
	return &text
}

func plain(header http.Header, name string) *string {
	if header.Values(name) == nil {
		return nil
	}
	text := header.Get(name)
	return &text
}

func serve(folder, port string) {
	var lock sync.Mutex
	handler := func(response http.ResponseWriter, request *http.Request) {
		length, err := io.Copy(io.Discard, request.Body)
		var sid *string
		if cookie, err := request.Cookie("sid"); err == nil {
			text := hex.EncodeToString([]byte(cookie.Value))
			sid = &text
		}
		seen := map[string]any{
			"case":     plain(request.Header, "X-Case"),
			"id":       plain(request.Header, "X-Request-Id"),
			"method":   request.Method,
			"path":     hex.EncodeToString([]byte(request.URL.Path)),
			"target":   request.RequestURI,
			"host":     request.Host,
			"key":      value(request.Header, "X-Api-Key"),
			"tenant":   value(request.Header, "X-Tenant"),
			"sid":      sid,
			"routed":   plain(request.Header, "X-Routed"),
			"headers":  request.Header,
			"length":   length,
			"complete": err == nil,
		}
		line, _ := json.Marshal(seen)
		lock.Lock()
		log, err := os.OpenFile(folder+"/"+port+".log", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err == nil {
			log.Write(append(line, '\n'))
			log.Close()
		}
		lock.Unlock()
		answer, _ := json.Marshal(map[string]any{"case": seen["case"], "path": seen["path"], "length": length})
		response.Header().Set("Content-Type", "application/json")
		response.Write(answer)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		panic(err)
	}
	panic(http.Serve(listener, http.HandlerFunc(handler)))
}

func main() {
	for _, port := range os.Args[2:] {
		go serve(os.Args[1], port)
	}
	select {}
}
