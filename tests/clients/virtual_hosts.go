// A Go server with virtual hosts over TLS: `virtual_hosts PORT FOLDER NAME…`. FOLDER has a certificate for each name. A
// request for another host gets 421.
package main

import (
	"crypto/tls"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
)

func main() {
	port, folder, names := os.Args[1], os.Args[2], os.Args[3:]
	config := &tls.Config{}
	for _, name := range names {
		path := filepath.Join(folder, name)
		pair, err := tls.LoadX509KeyPair(path+".pem", path+".key")
		if err != nil {
			panic(err)
		}
		config.Certificates = append(config.Certificates, pair)
	}
	handler := func(response http.ResponseWriter, request *http.Request) {
		host, _, err := net.SplitHostPort(request.Host)
		if err != nil {
			host = request.Host
		}
		isKnown := false
		for _, name := range names {
			isKnown = isKnown || name == host
		}
		if !isKnown {
			http.Error(response, "another host", http.StatusMisdirectedRequest)
			return
		}
		response.Header().Set("Content-Type", "application/json")
		json.NewEncoder(response).Encode(map[string]string{
			"host":      host,
			"protocol":  request.Proto,
			"sni":       request.TLS.ServerName,
			"forwarded": request.Header.Get("X-Forwarded-Host"),
			"port":      port,
		})
	}
	// NextProtos is empty, so that the server offers HTTP/2 and HTTP/1.1.
	server := &http.Server{Addr: "127.0.0.1:" + port, Handler: http.HandlerFunc(handler), TLSConfig: config}
	panic(server.ListenAndServeTLS("", ""))
}
