// Fetches every URL with one http.Client, and writes each body to a file whose name is the URL's number.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
)

func get(client *http.Client, url, path string) error {
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, answer.Status)
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	length, err := io.Copy(file, answer.Body)
	if err == nil && length != answer.ContentLength {
		err = fmt.Errorf("%s: %d bytes of %d", url, length, answer.ContentLength)
	}
	return err
}

func main() {
	client := &http.Client{}
	for index, url := range os.Args[2:] {
		if err := get(client, url, filepath.Join(os.Args[1], fmt.Sprint(index))); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
